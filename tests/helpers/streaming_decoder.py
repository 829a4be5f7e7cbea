"""A naive decoder whose streaming heads drop keys, one row and one head at a time."""

import numpy as np
import torch

from midfill.methods.evict.streaming_heads import HeadSplit
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.runners.forward.attention import QUERY_BLOCK
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.torch.decoder import Decoder, PreparedBatch
from midfill.runners.torch.runner import TorchRunner, load_torch_runner


class StreamingDecoder(Decoder):
    """Attends as a split of heads says, over keys that are all there; for whole texts only."""

    def with_split(self, split: HeadSplit, prompt: int) -> "StreamingDecoder":
        self.split, self.prompt = split, prompt
        return self

    def dropped(self, place: int) -> int:
        """How many keys streaming heads have dropped when the token at ``place`` is computed."""
        rule, dropped = self.split.rule, 0
        for length in range(self.prompt, place + 1):
            since = length - self.prompt
            if since == 0 or (rule.interval and since % rule.interval == 0):
                dropped = length - rule.sinks - max(rule.recent, int(rule.share * length))
        return max(dropped, 0)

    def attend(
        self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: PreparedBatch
    ) -> torch.Tensor:
        group = self.config.query_heads // self.config.kv_heads
        out = torch.zeros_like(q)
        for row in range(len(q)):
            for head in range(self.config.query_heads):
                kv_head = head // group
                keys, values = k[: row + 1, kv_head], v[: row + 1, kv_head]
                scores = keys @ q[row, head] * self.config.score_scale
                whole = self.split.retrieval[index * self.config.kv_heads + kv_head]
                gone = 0 if whole or row < self.prompt else self.dropped(row)
                sinks = self.split.rule.sinks
                stays = [i for i in range(row + 1) if not sinks <= i < sinks + gone]
                weights, seen = scores[stays].exp(), values[stays]
                if gone and self.split.rule.mean:
                    mean = keys[sinks : sinks + gone].mean(0)
                    weight = gone * (mean @ q[row, head] * self.config.score_scale).exp()
                    weights = torch.cat((weight[None], weights))
                    seen = torch.cat((values[sinks : sinks + gone].mean(0)[None], seen))
                out[row, head] = weights @ seen / weights.sum()
        return out


def streaming_logprobs(
    runner: TorchRunner, tokens: list[int], prompt: int, split: HeadSplit
) -> torch.Tensor:
    """Return the log probabilities [tokens after the prompt, vocab] of each next token."""
    own = runner.decoder
    decoder = StreamingDecoder(own.config, own.weights, own.kv_cache).with_split(split, prompt)
    return _logprobs(decoder, tokens, prompt)


class MaskedDecoder(Decoder):
    """Attends by one matrix per kind of head: all earlier keys, or sinks and recent ones."""

    def with_mask(self, split: HeadSplit, streamed: torch.Tensor) -> "MaskedDecoder":
        self.split, self.streamed = split, streamed
        return self

    def attend(
        self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: PreparedBatch
    ) -> torch.Tensor:
        out = torch.empty_like(q)
        for head in range(self.config.query_heads):
            kv_head = head // (self.config.query_heads // self.config.kv_heads)
            scores = q[:, head] @ k[:, kv_head].T * self.config.score_scale
            whole = self.split.retrieval[index * self.config.kv_heads + kv_head]
            seen = torch.ones_like(self.streamed).tril() if whole else self.streamed
            out[:, head] = scores.masked_fill(~seen, -torch.inf).softmax(1) @ v[:, kv_head]
        return out


def masked_logprobs(
    checkpoint: Checkpoint, tokens: list[int], prompt: int, split: HeadSplit
) -> torch.Tensor:
    """Return the same where streaming heads stream through the prompt as well.

    Rows of a block of the prompt see what its first one does; later ones sinks, recent keys and
    themselves.
    """
    count, rule = len(tokens), split.rule
    row, key = torch.arange(count)[:, None], torch.arange(count)
    begin = torch.where(row < prompt, row // QUERY_BLOCK * QUERY_BLOCK, row - 1)
    streamed = (key <= row) & ((key < rule.sinks) | (begin - key < rule.recent))
    own = load_torch_runner(checkpoint, slots=count).decoder
    decoder = MaskedDecoder(own.config, own.weights, own.kv_cache).with_mask(split, streamed)
    return _logprobs(decoder, tokens, prompt)


def _logprobs(decoder: Decoder, tokens: list[int], prompt: int) -> torch.Tensor:
    """Return the log probabilities [tokens after the prompt, vocab] of each next token."""
    numbers, ends = np.arange(len(tokens), dtype=np.int32), np.array([0, len(tokens)], np.int32)
    batch = ForwardBatch(
        token_ids=np.array(tokens, np.int32),
        positions=numbers,
        write_slots=numbers,
        query_indptr=ends,
        kv_indptr=ends,
        kv_slots=numbers,
        logit_rows=numbers[prompt - 1 : -1],
    )
    with torch.inference_mode():
        hidden = decoder.run_layers(
            decoder.prepare(batch), decoder.embed(batch), 0, decoder.config.layers
        )
        return decoder.compute_logits(batch, hidden).log_softmax(-1)
