"""Sources and sinks of live records: one small protocol, one file a broker."""
