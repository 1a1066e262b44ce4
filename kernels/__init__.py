"""Maths on tensors: every write rule of the memories, stated once in float64 and computed fast elsewhere."""
