"""Arrays on devices: how they are recognized, created, copied and communicated."""
