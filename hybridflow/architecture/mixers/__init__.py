"""Token mixers: a file for each, and `known` with all of them."""
