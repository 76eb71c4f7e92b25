"""The documentation: pages of Markdown, and the Python that writes some of them."""
