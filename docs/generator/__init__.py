"""What `python docs/generate.py` writes, a module a page."""
