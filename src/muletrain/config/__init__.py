"""The request: recipes and command line arguments to RunConfig, and the environment variables the program listens to."""
