"""In which order links are measured: rounds of disjoint pairs, so that no host serves two links at once. Pure."""

Pair = tuple[int, int]  # of places in a list, the smaller first

MOST_FOR_ALL_PAIRS = 16  # hosts; with more of them only neighbours on a ring are measured


def all_pairs(count: int) -> list[list[Pair]]:
    """Every pair once, in as few rounds as there can be: the circle method of tournaments."""
    places: list[int | None] = list(range(count))
    if count % 2:
        places.append(None)  # who meets nobody sits out
    rounds = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        meetings = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([_ordered(one, other) for one, other in meetings if one is not None and other is not None])
        places.insert(1, places.pop())
    return [pairs for pairs in rounds if pairs]


def ring(count: int) -> list[list[Pair]]:
    """Each place with the next one, and the last with the first: two rounds, three where the count is odd."""
    if count < 2:
        return []
    edges = [(place, place + 1) for place in range(count - 1)]
    rounds = [edges[0::2], edges[1::2]]
    if count > 2:
        closing = [(0, count - 1)]
        if count % 2:
            rounds.append(closing)
        else:
            rounds[1] = rounds[1] + closing
    return [pairs for pairs in rounds if pairs]


def between_hosts(count: int) -> list[list[Pair]]:
    return all_pairs(count) if count <= MOST_FOR_ALL_PAIRS else ring(count)


def _ordered(one: int, other: int) -> Pair:
    return (one, other) if one < other else (other, one)
