"""How ranks are started, owned and ended: one file a launcher, one torch-free supervisor that owns every process."""
