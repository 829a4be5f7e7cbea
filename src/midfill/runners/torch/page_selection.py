"""Pages that rows choose by their queries (``runners.forward.page_selection``), in the open.

Every choice is made anew from all keys, and what isn't chosen is masked: the reference of the CPU
runner's kernels.
"""

import numpy as np
import torch

from midfill.runners.forward.page_selection import (
    PageSelection,
    all_pages,
    chosen_keys,
    select_from_keys,
)


def mask_unchosen(
    scores: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    kept: torch.Tensor,
    most: int,
    visible: torch.Tensor,
    layer: int,
    selection: PageSelection,
) -> torch.Tensor:
    """Make one layer's choices, and return the scores with those of all other keys at -inf.

    Args:
        scores: [kv_heads, group, rows, keys].
        q: [rows, kv_heads, group, head_dim].
        k: [kv_heads, keys, head_dim]: places of cells, then slots.
        kept: [kv_heads, 1], how many of the ``most`` places of cells are filled.
        most: see above.
        visible: [rows, 1], how many of the slots each row sees.
        layer: which one.
        selection: the request's; its choices are written.
    """
    kv_heads, group, _, columns = scores.shape
    mask = np.zeros(tuple(scores.shape), bool)
    queries, keys = q.cpu().numpy(), k.cpu().numpy()
    slots_seen = visible[:, 0].tolist()
    for head in range(kv_heads):
        cells = int(kept[head, 0])
        places = np.concatenate((np.arange(cells), np.arange(most, columns)))
        chooses = bool(selection.heads[layer, head])
        for own in range(group):
            chosen = selection.chosen[:, layer, head * group + own]
            for choice, row in enumerate(selection.made_by.tolist()):
                if row >= 0:
                    seen = keys[head, places[: cells + slots_seen[row]]]
                    rule = selection.rule
                    if not chooses:
                        chosen[choice] = all_pages(rule)
                    else:
                        chosen[choice] = select_from_keys(queries[row, head, own], seen, rule)
            for row, choice in enumerate(selection.of_row.tolist()):
                listed = chosen_keys(chosen[choice], selection.rule, cells + slots_seen[row])
                mask[head, own, row, places[: len(listed)]] = listed
                selection.pairs[row, head * group + own] += listed.sum()
    return scores.masked_fill(~torch.from_numpy(mask).to(scores.device), -torch.inf)
