"""The outside world: tables, sequence files, streams and checkpoints. Imports no torch."""
