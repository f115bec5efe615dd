"""One page that shows what every dimension of a run fires for."""
