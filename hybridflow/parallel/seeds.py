"""Seeds that are pure functions of what they are for: the same on every rank, in every layout, after every restart."""

import hashlib


def request_seed(*identity: int | str) -> int:
    """A 63-bit seed that is a pure function of (run seed, iteration, prompt, sample) and the like."""
    digest = hashlib.blake2b(",".join(map(str, identity)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
