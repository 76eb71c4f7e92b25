"""What follows a layer's mixer: a file for each kind, and `known` with all of them."""
