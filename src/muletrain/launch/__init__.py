"""Starting workers, and the folder that a run lives in."""
