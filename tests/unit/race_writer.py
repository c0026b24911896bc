"""A CMS that saves one post over and over, by rename, as fast as it can, in bursts.

Its arguments: the queue folder, how many bursts, how many saves in each, the file's name or `-` for one
name per save. After each burst it says the number of its last save and waits for a line.
"""

import json
import os
import random
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

folder, bursts, saves, name = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
number = 0
for _ in range(bursts):
    for _ in range(saves):
        number += 1
        created = datetime.fromtimestamp(1_700_000_000 + number, UTC).isoformat()
        temp = folder / f".{number}.tmp"
        temp.write_text(
            json.dumps({"id": str(number), "slug": "post", "paths": [str(number)], "createdAt": created})
        )
        os.replace(temp, folder / (f"{number}.json" if name == "-" else f"{name}.json"))  # noqa: PTH105
        time.sleep(random.choice([0, 0, 0.0001, 0.0005]))
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()
    sys.stdin.readline()
