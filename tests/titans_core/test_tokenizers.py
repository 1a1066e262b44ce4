"""Tokenisers: every text comes back, streams equal one shot, DNA rules hold."""

import os
import random
from pathlib import Path

import numpy as np
import pytest

from titans_core.tokenizers import (
    BaseTokenizer,
    BpeTokenizer,
    ByteTokenizer,
    KmerTokenizer,
    TokenError,
    complement,
    encode_bases,
    from_json,
    load,
)

CASES = Path(__file__).parents[2] / "../shared/cases/sequences"
TEXT = "In the beginning God created the heaven and the earth. Ωmega, naïve — 日本 🜁!\n\tTwo  blanks.  "
DNA = "".join(random.Random(4).choices("ACGT", k=997))


def bpe():
    return BpeTokenizer.train([TEXT * 3], 300, specials=["<end>"])


@pytest.fixture
def case():
    def find(name):
        path = CASES / name
        if not path.exists():
            if os.environ.get("TETHYS_REQUIRE_DATA") == "1":
                pytest.fail(f"shared case {name} is required and absent")
            pytest.skip(f"shared case {name} is absent")
        return path

    return find


@pytest.mark.parametrize("make", [ByteTokenizer, bpe], ids=["bytes", "bpe"])
def test_any_text_comes_back_whole_and_in_pieces(make):
    tokenizer = make()
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert "".join(tokenizer.decode_stream(ids)) == TEXT
    for size in (1, 3, 7, 50):
        pieces = [TEXT[i : i + size] for i in range(0, len(TEXT), size)]
        assert np.concatenate(list(tokenizer.encode_stream(pieces))).tolist() == ids.tolist()


@pytest.mark.parametrize(
    "make",
    [
        BaseTokenizer,
        lambda: KmerTokenizer(6),
        lambda: KmerTokenizer(3, overlap=True),
        lambda: BpeTokenizer.train([DNA], 280, dna=True),
    ],
    ids=["bases", "side by side", "overlapping", "bpe"],
)
def test_dna_comes_back_whole_and_in_pieces_whatever_its_case(make):
    tokenizer = make()
    ids = tokenizer.encode(DNA)
    assert tokenizer.decode(ids) == DNA
    assert tokenizer.encode(DNA.lower()).tolist() == ids.tolist()
    assert "".join(tokenizer.decode_stream(ids)) == DNA
    for size in (1, 5, 100):
        pieces = [DNA[i : i + size] for i in range(0, len(DNA), size)]
        assert np.concatenate(list(tokenizer.encode_stream(pieces))).tolist() == ids.tolist()
    again = from_json(tokenizer.to_json())
    assert again.encode(DNA).tolist() == ids.tolist()


def test_case_04_ambiguity_codes_share_one_id(case):
    sequence = case("04_iupac.fa").read_text().split()[1]
    assert encode_bases(sequence).tolist() == [0, 1, 2, 3] + [4] * 11
    assert complement(encode_bases(sequence)).tolist() == [4] * 11 + [0, 1, 2, 3]
    assert set(KmerTokenizer(6, overlap=True).encode(sequence)) == {4**6 + 4}
    assert KmerTokenizer(6).decode(KmerTokenizer(6).encode(sequence)) == "ACGT" + "N" * 11
    with pytest.raises(TokenError, match="'E' at base 3"):
        encode_bases("ACE")


def test_case_10_tails_of_any_length(case):
    for sequence in case("10_kmer_tail.txt").read_text().split():
        tokenizer = KmerTokenizer(6)
        ids = tokenizer.encode(sequence)
        assert len(ids) == len(sequence) // 6 + len(sequence) % 6
        assert 4**6 + 4 not in ids  # no N
        assert tokenizer.decode(ids) == sequence
        assert len(KmerTokenizer(6, overlap=True).encode(sequence)) == max(0, len(sequence) - 5)


def test_special_tokens_follow_the_own_ones_and_leave_no_text(tmp_path):
    tokenizer = ByteTokenizer(specials=["<start>", "<end>"])
    assert (tokenizer.size, tokenizer.specials) == (258, {"<start>": 256, "<end>": 257})
    assert tokenizer.decode([256, 104, 105, 257]) == "hi"
    with pytest.raises(TokenError, match="id 258 is outside 0 to 257"):
        tokenizer.decode([258])
    (tmp_path / "t.json").write_text(tokenizer.to_json())
    assert load(tmp_path / "t.json").specials == tokenizer.specials
    with pytest.raises(TokenError, match="kind 'x'"):
        from_json('{"kind": "x"}')


def test_limits_are_said():
    with pytest.raises(TokenError, match="k 13"):
        KmerTokenizer(13)
    with pytest.raises(TokenError, match="at least 256"):
        BpeTokenizer.train(["a"], 10)
