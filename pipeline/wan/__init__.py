"""Building blocks that both Wan-derived models share."""
