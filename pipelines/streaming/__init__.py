"""Online adaptation: live records move each stream's memory one step, exactly once."""
