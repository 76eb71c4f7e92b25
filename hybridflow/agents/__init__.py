"""Agents that speak to the model over HTTP: their requests are turns of rows."""
