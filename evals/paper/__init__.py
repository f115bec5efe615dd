"""The claims of the paper: `parts` are trained and measured, `verdicts` decides on them."""
