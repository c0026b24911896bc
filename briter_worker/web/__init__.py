"""The dashboard and its API, for one site or for all sites of a cluster: the command `serve`."""
