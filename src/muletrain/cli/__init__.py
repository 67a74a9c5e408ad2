"""The command `mule`: one file a verb, each parses, calls one room and prints."""
