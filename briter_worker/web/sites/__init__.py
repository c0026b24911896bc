"""The dashboard of a cluster: all sites on one page, and below it each site's own pages and API."""
