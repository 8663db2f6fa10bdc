"""A live view of runs: pages for a browser, and numbers for Prometheus."""
