"""The live service: events in over HTTP, forecasts out, every memory durable before the reply."""
