"""Git: the publisher and what it is made of."""

import os

# GitPython runs git as it is imported: never one that lies in the current folder, which may be the site's.
_path = os.environ.get("PATH", os.defpath).split(os.pathsep)
if not all(map(os.path.isabs, _path)):
    os.environ["PATH"] = os.pathsep.join(filter(os.path.isabs, _path)) or os.defpath
