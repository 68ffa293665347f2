"""Whether a run fits its machines: memory, disk, and settings that are the same on all of them."""
