"""Generation: batch = alone, prompts of any length, saved and branched conversations, sampling rules, stop strings, constant memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from titans_core import generation
from titans_core import state as value
from titans_core.config import ConfigError
from titans_core.generation import END, START, Conversation, Sampling, Writing, encode_prompt, generate, probabilities, read
from titans_core.language_model import LanguageModel, configure, save
from titans_core.tokenizers import BpeTokenizer, ByteTokenizer, Tokenizer

PROMPTS = ["In the beginning", "And", "", "a longer prompt than the segment, the window and the chunk of this model hold together: x"]


def build(layers: str, memory: str = "exact", tokenizer: Tokenizer | None = None) -> tuple[LanguageModel, Tokenizer]:
    torch.manual_seed(3)
    tokenizer = tokenizer or ByteTokenizer([START, END])
    small = {"chunk": 8, "attention_window": 8, "segment": 8, "persistent": 2}
    return LanguageModel(configure("tiny", tokenizer.size, layers=layers, memory=memory, **small)).eval(), tokenizer


@pytest.mark.parametrize("layers, memory", [("mag", "exact"), ("mac", "titans"), ("attention+lmm", "exact"), ("dot", "exact")])
def test_a_batch_of_different_prompts_is_each_prompt_alone(layers, memory):
    """Logits and state after the prompt, and the drawn text, are those of the prompt by itself: nothing was padded."""
    model, tokenizer = build(layers, memory)
    ids = [encode_prompt(tokenizer, text) for text in PROMPTS]
    seen = []
    for rows, together in read(model, ids):
        for place, row in enumerate(rows.tolist()):
            [(_, alone)] = read(model, [ids[row]])
            mine = value.select(together, [place])
            torch.testing.assert_close(mine.logits, alone.logits, atol=1e-4, rtol=1e-4)
            assert mine.count.tolist() == [len(ids[row])] and torch.equal(mine.held, alone.held)
            probe = torch.tensor([[5, 6, 7]])
            with torch.inference_mode():
                torch.testing.assert_close(model(probe, mine.state)[0], model(probe, alone.state)[0], atol=1e-4, rtol=1e-4)
            seen.append(row)
    assert sorted(seen) == [0, 1, 2, 3]
    batch = generate(model, tokenizer, PROMPTS, sampling=Sampling(seed=11), limit=12)
    for row, text in enumerate(PROMPTS):
        assert generate(model, tokenizer, [text], sampling=Sampling(seed=11 + row), limit=12) == [batch[row]]


@pytest.mark.parametrize("layers", ["mag", "mac", "mal", "lmm", "attention", "swdt"])
def test_decoding_step_by_step_is_reading_at_once(layers):
    model, _ = build(layers)
    ids = torch.randint(258, (1, 30))
    [(_, whole)] = read(model, ids.tolist())
    [(_, steps)] = read(model, ids[:, :4].tolist())
    go_on, steps = generation.decoder(model), value.owned(steps)
    for at in range(4, 30):
        steps = go_on(steps, ids[:, at])
    torch.testing.assert_close(steps.logits, whole.logits, atol=1e-4, rtol=1e-4)
    assert torch.equal(steps.held, whole.held) and torch.equal(steps.count, whole.count)


def test_reading_in_pieces_is_reading_at_once_and_writes_the_memory(monkeypatch):
    model, _ = build("mag")
    ids = torch.randint(258, (2, 50)).tolist()
    [(_, whole)] = read(model, ids)
    monkeypatch.setattr(generation, "READ_AT_ONCE", 7)
    [(_, pieces)] = read(model, ids)
    torch.testing.assert_close(pieces.logits, whole.logits, atol=1e-4, rtol=1e-4)
    memory = whole.state[0].memory.memory.W
    assert not torch.equal(memory, model.initial_state(2)[0].memory.memory.W)


def test_a_conversation_of_fixed_size_stays_so_and_a_growing_one_grows():
    for layers, grows in (("mag", False), ("mac", False), ("attention", True)):
        model, _ = build(layers)
        [(_, short)] = read(model, [[1] * 10])
        [(_, long)] = read(model, [[1] * 100])
        sizes = [sum(leaf.numel() for _, leaf in value.leaves(each.state)) for each in (short, long)]
        assert (sizes[1] > sizes[0]) == grows == model.config.grows


def run_to_end(model, tokenizer, conversation, limit, sampling, stop=()):
    writing = Writing(model, tokenizer, conversation, sampling=sampling, limit=limit, stop=stop)
    return "".join(writing), writing.conversation()


@pytest.mark.parametrize("layers, memory", [("mag", "exact"), ("mac", "titans"), ("attention", "exact"), ("lmm", "atlas")])
def test_a_saved_conversation_goes_on_in_another_process(layers, memory, tmp_path):
    """Twelve tokens, saved, and twelve more elsewhere are the twenty-four of one run, letter by letter."""
    model, tokenizer = build(layers, memory, ByteTokenizer([START]))  # no <end>: the text goes on
    sampling = Sampling(temperature=0.9, top_p=0.95, repetition_penalty=1.1, seed=5)
    [(_, start)] = read(model, [encode_prompt(tokenizer, "Once upon")])
    whole, after_whole = run_to_end(model, tokenizer, start, 24, sampling)
    first, middle = run_to_end(model, tokenizer, start, 12, sampling)
    save(model, tokenizer, tmp_path / "model.safetensors")
    (tmp_path / "talk").write_bytes(generation.to_bytes(middle, model))
    script = (
        "import sys; from titans_core import generation as g; from titans_core.language_model import load\n"
        f"model, tokenizer = load({str(tmp_path / 'model.safetensors')!r})\n"
        f"talk = g.from_bytes(open({str(tmp_path / 'talk')!r}, 'rb').read(), model)\n"
        "ids, go_on = [], g.decoder(model)\n"
        f"for _ in range(12):\n"
        f"    token = g.draw(talk, g.Sampling(temperature=0.9, top_p=0.95, repetition_penalty=1.1), [5])\n"
        "    ids.append(int(token)); talk = go_on(talk, token)\n"
        "print(ids)\n"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert shown.returncode == 0, shown.stderr
    later = [int(each) for each in shown.stdout.strip("[]\n").split(",")]
    ids, go_on, talk = [], generation.decoder(model), value.owned(start)
    for _ in range(24):
        token = generation.draw(talk, sampling, [5])
        ids.append(int(token))
        talk = go_on(talk, token)
    assert ids[12:] == later
    assert whole == tokenizer.decode(ids) and torch.equal(talk.logits, after_whole.logits)


def test_branches_do_not_touch_each_other_and_the_trunk_stays():
    model, tokenizer = build("mag")
    [(_, trunk)] = read(model, [encode_prompt(tokenizer, "Two ways:")])
    before = generation.to_bytes(trunk, model)
    left = run_to_end(model, tokenizer, trunk, 10, Sampling(seed=1))
    right = run_to_end(model, tokenizer, trunk, 10, Sampling(seed=2))
    assert left[0] != right[0]
    assert run_to_end(model, tokenizer, trunk, 10, Sampling(seed=1))[0] == left[0]
    assert generation.to_bytes(trunk, model) == before


def test_bytes_of_another_model_or_none_are_refused():
    model, tokenizer = build("mag")
    [(_, talk)] = read(model, [encode_prompt(tokenizer, "x")])
    data = generation.to_bytes(talk, model)
    other, _ = build("mac")
    with pytest.raises(value.StateError, match="held with another model"):
        generation.from_bytes(data, other)
    with pytest.raises(value.StateError, match="are not a saved state"):
        generation.from_bytes(b"nonsense", model)
    assert generation.to_bytes(generation.from_bytes(data, model), model) == data


LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, -2.0]])
NONE_HELD = torch.zeros(1, 5, dtype=torch.bool)


def chosen(**settings):
    return probabilities(LOGITS, NONE_HELD, Sampling(**settings))[0]


def test_sampling_rules():
    p = LOGITS[0].double().softmax(0)
    torch.testing.assert_close(chosen(), p)
    torch.testing.assert_close(chosen(temperature=0.5), (2 * LOGITS[0].double()).softmax(0))
    assert chosen(temperature=0).tolist() == [1, 0, 0, 0, 0]
    torch.testing.assert_close(chosen(top_k=2)[:2], p[:2] / p[:2].sum())
    assert chosen(top_k=2)[2:].tolist() == [0, 0, 0]
    assert (chosen(top_p=0.7) > 0).tolist() == [True, True, False, False, False]  # 0.636, 0.870
    assert (chosen(top_p=0.63) > 0).tolist() == [True, False, False, False, False]
    assert (chosen(min_p=0.1) > 0).tolist() == [True, True, True, False, False]  # ratios 1, 0.37, 0.135, 0.05
    held = torch.tensor([[True, False, False, True, False]])
    penalised = probabilities(LOGITS, held, Sampling(repetition_penalty=2.0))[0]
    torch.testing.assert_close(penalised, torch.tensor([1.0, 1.0, 0.0, -2.0, -2.0], dtype=torch.float64).softmax(0))
    for wrong in ({"temperature": -1}, {"top_p": 0}, {"min_p": 2}, {"top_k": -1}, {"repetition_penalty": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Sampling(**wrong)


def test_draws_follow_the_probabilities():
    n = 4000
    many = Conversation((), LOGITS.expand(n, 5), NONE_HELD.expand(n, 5), torch.arange(n))
    drawn = generation.draw(many, Sampling(top_k=3), [0] * n)
    share = torch.bincount(drawn, minlength=5) / n
    torch.testing.assert_close(share.double(), chosen(top_k=3), atol=0.03, rtol=0)
    assert share[3:].tolist() == [0, 0]


class Script(LanguageModel):
    """A model that says one given text, whatever it reads."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        super().__init__(configure("tiny", tokenizer.size, layers="window", attention_window=4, persistent=0))
        self.ids = [*tokenizer.encode(text).tolist(), tokenizer.specials[END]]

    def in_place(self):
        step = super().in_place()

        def scripted(tokens, state):
            logits, state = step(tokens, state)
            for row, seen in enumerate(state[0].seen.tolist()):
                logits[row] = 0.0
                logits[row, self.ids[min(seen - 1, len(self.ids) - 1)]] = 50.0
            return logits, state

        return scripted

    def head(self, hidden):
        logits = super().head(hidden)
        if hidden.dim() == 2:  # after the prompt, which is <start> alone
            logits = torch.zeros_like(logits)
            logits[:, self.ids[0]] = 50.0
        return logits


@pytest.mark.parametrize("stop, text, reason", [
    ((), "naïve — 日本 said the END", "end"),
    (("said",), "naïve — 日本 ", "stop"),
    (("said the king", "本 s"), "naïve — 日", "stop"),
    (("END!", "ENDE"), "naïve — 日本 said the END", "end"),
])  # fmt: skip
@pytest.mark.parametrize("tokenizer", [
    ByteTokenizer([START, END]), BpeTokenizer.train(["naïve — 日本 said the END " * 5], 290, specials=[START, END]),
], ids=["bytes", "bpe"])  # fmt: skip
def test_stop_strings_cross_tokens_and_text_comes_in_whole_characters(stop, text, reason, tokenizer):
    model = Script(tokenizer, "naïve — 日本 said the END").eval()
    [found] = generate(model, tokenizer, [""], sampling=Sampling(temperature=0), limit=100, stop=stop)
    assert (found.text, found.reason) == (text, reason)
    [(_, talk)] = read(model, [encode_prompt(tokenizer, "")])
    pieces = list(Writing(model, tokenizer, talk, sampling=Sampling(temperature=0), limit=100, stop=stop))
    assert "".join(pieces) == text and "\ufffd" not in "".join(pieces)
    assert len(pieces) > 2


def test_the_limit_ends_a_text():
    tokenizer = ByteTokenizer([START, END])
    [found] = generate(Script(tokenizer, "abcdef").eval(), tokenizer, [""], sampling=Sampling(), limit=3)
    assert (found.text, found.reason, len(found.ids)) == ("abc", "limit", 3)
    with pytest.raises(ConfigError, match="stop string must not be empty"):
        generate(Script(tokenizer, "a").eval(), tokenizer, [""], sampling=Sampling(), limit=3, stop=[""])
