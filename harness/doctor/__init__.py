"""Is this machine fit for a distributed run? One file a line of `harness doctor`; each looks at one thing and starts nothing."""
