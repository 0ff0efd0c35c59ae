"""What the probe looks at: one file a sensor, each with `arm()`, found by listing this folder."""
