"""Worker processes: stage actors that hold the caches of sessions and run one task at a time."""
