from ostro.kernels.gpu.state_rows import PIECE_ROWS, StateChunk, chunk_tables


def test_a_chunk_is_cut_where_its_state_is_wanted_and_its_own_slot_comes_last() -> None:
    chunks, pieces = chunk_tables([StateChunk(2, 14, 3, 100, ((10, 7), (14, 8)))])
    assert chunks.tolist() == [[3, 100, 0, 3]]
    assert pieces.tolist() == [[2, 10, 7, 0], [12, 4, 8, 0], [16, 0, 3, 0]]


def test_long_chunks_have_pieces_of_limited_length() -> None:
    chunks, pieces = chunk_tables([StateChunk(0, 1, 5, 0), StateChunk(1, 2 * PIECE_ROWS + 3, 6, 0)])
    assert chunks.tolist() == [[5, 0, 0, 1], [6, 0, 1, 4]]
    assert pieces.tolist() == [
        [0, 1, 5, 0],
        [1, PIECE_ROWS, -1, 1],
        [1 + PIECE_ROWS, PIECE_ROWS, -1, 1],
        [1 + 2 * PIECE_ROWS, 3, 6, 1],
    ]


def test_no_chunks_are_empty_tables() -> None:
    chunks, pieces = chunk_tables([])
    assert chunks.shape == (0, 4)
    assert pieces.shape == (0, 4)
