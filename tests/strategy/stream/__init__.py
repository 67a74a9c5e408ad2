"""The streamed strategy's own tests."""
