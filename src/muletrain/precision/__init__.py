"""Number formats of a run and the dynamic loss scale of fp16."""
