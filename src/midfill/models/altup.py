"""AltUp: hidden rows of several streams, with what else the models have that use them."""

from dataclasses import dataclass

STREAMS = 4
"""Streams of a hidden row with ``AltUp``; the first one is what layers compute with."""


@dataclass(frozen=True)
class AltUp:
    """Hidden rows of four streams, and a token's embeddings for each layer (Gemma 3n).

    Sources: alternating updates, Baykal et al. 2023, arXiv 2301.13310; the learned augmented
    residual (LAuReL), Menghani, Kumar and Kumar 2024, arXiv 2411.07501; the rest as transformers'
    ``modeling_gemma3n`` computes it. Norms are RMSNorms.

    A text's first rows are h_0 = the token's embedding and h_s = U_s h_0 of the same length. With
    r(x) = tanh(R norm(x) / hidden), of four numbers, a layer computes

        p_s = h_s + sum_i P[s, i] h_i           with the 16 numbers P = W_P r(h_0),
        n = norm(p_0),
        a = (p_0 + norm(attention(n)) + n + norm(W_right W_left n)) / sqrt(2),
        m = a + norm(MLP(norm(a))),
        h_s = p_s + (1 + (W_C r(m))_s) (m - p_0),

    and adds norm(W_out (act(W_gate (scale * h_0)) * e)) to all of them but h_0. For each layer, e
    is (norm(W_e h_0 / sqrt(hidden)) + sqrt(layer_width) E) / sqrt(2), of the h_0 that the text
    began with and the token's embedding E for that layer. After the last layer, the streams are
    projected back, brought to the length of h_0, and averaged.

    So that layers need nothing else of a token, a row is as wide as all four streams and all e
    together, in this order (``ModelConfig.row_width``).

    Attributes:
        laurel_rank: rows of W_left.
        layer_width: numbers of e in each layer.
        layer_vocab: tokens that have embeddings for layers; others have those of token 0.
    """

    laurel_rank: int
    layer_width: int
    layer_vocab: int

    def outer_shapes(self, hidden: int, layers: int) -> dict[str, tuple[int, ...]]:
        """Return canonical name -> shape of what a model has beside its layers.

        Args:
            hidden: numbers of a stream.
            layers: of the model.
        """
        embedded = layers * self.layer_width
        shapes: dict[str, tuple[int, ...]] = {
            "layer_embed.weight": (self.layer_vocab, embedded),
            "layer_project.weight": (embedded, hidden),
            "layer_project_norm.weight": (self.layer_width,),
        }
        for stream in range(STREAMS - 1):
            shapes[f"altup_proj.{stream}.weight"] = (hidden, hidden)
            shapes[f"altup_unembed.{stream}.weight"] = (hidden, hidden)
        return shapes

    def layer_shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of what each layer has beside attention and its MLP."""
        return {
            "altup_router.weight": (STREAMS, hidden),
            "altup_router_norm.weight": (hidden,),
            "altup_predict.weight": (STREAMS * STREAMS, STREAMS),
            "altup_correct.weight": (STREAMS, STREAMS),
            "altup.correct_output_scale": (hidden,),
            "laurel_left.weight": (self.laurel_rank, hidden),
            "laurel_right.weight": (hidden, self.laurel_rank),
            "laurel_norm.weight": (hidden,),
            "layer_gate.weight": (self.layer_width, hidden),
            "layer_out.weight": (hidden, self.layer_width),
            "layer_norm.weight": (hidden,),
        }
