"""What is in this box."""
