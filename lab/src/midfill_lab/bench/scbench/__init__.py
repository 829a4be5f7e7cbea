"""SCBench: what methods lose when several questions share one context, in turns and in requests."""
