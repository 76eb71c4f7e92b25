"""What only a GPU can show. `python -m tests.gpu` prints one report; as tests they are skipped where there is none."""
