"""Views: what is known of a document around the caret, and which part of it goes into the prompt.

Many editors send a window of characters or lines around the caret. The window's far edges slide
with every keystroke, so the first token of the prompt changes each time and no cached prefix
matches. A view remembers the text sent before and keeps the prompt's edges where they were. It
moves them in rare, large hops: when the prompt would grow past 1.5 times what was sent, or when an
edge would cut off more than a quarter of what was sent on its side.

Remembered text goes into a prompt only while the client's window slides. A far edge *slides* when
text left at the edge while some came in nearer to the caret, or the other way round. When only the
far edge changed, the document itself has changed there, and the prompt begins with what was sent.
If the window grows with its text, the client sends everything, and remembered text is dropped, too.

Some clients send a *header* in front of their window, a comment with the language or the file's
name. It stays while the text behind it slides, which tells it from the document's own text.
"""

from dataclasses import dataclass, replace

from midfill.infill.common_affixes import common_prefix, common_suffix

_PROBE = 64  # characters that locate a window's edge in the remembered text
_MAX_PLACES = 4  # matches of a probe considered on each side of the expected place
_MIN_WINDOW = 4 * _PROBE  # characters; a shorter text is no window
_MAX_GROWTH = 1.5  # of the prompt, relative to what was sent
_MAX_LOSS = 0.25  # of what was sent on one side
_REMEMBERED = 4  # times what was sent, beyond each edge
_MIN_HEADER, _MAX_HEADER = 8, 2000  # characters


@dataclass(frozen=True, slots=True)
class View:
    """A document as far as it is known. Positions are indices into ``text``.

    Attributes:
        text: all that is remembered, in its newest version.
        caret: the caret's position.
        left, right: bounds of the part that goes into the prompt.
        sent_left, sent_right: bounds of the part the client sent last.
        header: what the client puts in front of its window; no part of ``text``.
    """

    text: str
    caret: int
    left: int
    right: int
    sent_left: int
    sent_right: int
    header: str = ""

    @classmethod
    def of(cls, prefix: str, suffix: str, header: str = "") -> "View":
        """Return the view of exactly what was sent; ``prefix`` is without the header."""
        text = prefix + suffix
        return cls(text, len(prefix), 0, len(text), 0, len(text), header)

    @property
    def prefix(self) -> str:
        """The text before the caret that goes into the prompt."""
        return self.header + self.text[self.left : self.caret]

    @property
    def suffix(self) -> str:
        """The text after the caret that goes into the prompt."""
        return self.text[self.caret : self.right]

    def behind_header(self, length: int) -> "View":
        """Return the view in which the first characters that were sent are known as a header.

        Text from before it, which the prompt may hold, is forgotten.
        """
        start = self.sent_left + length
        return View(
            self.text[start:],
            self.caret - start,
            0,
            self.right - start,
            0,
            self.sent_right - start,
            self.text[self.sent_left : start],
        )


@dataclass(frozen=True, slots=True)
class Overlap:
    """How a newly sent text lies over a view's remembered one.

    Attributes:
        left, right: where the new text begins and ends, in positions of the old one; below 0 or
            past its end where it shows more than was known.
        left_found, right_found: whether the old text agrees at that edge.
        shared: characters that the two have in common, from the new text's ends inwards.
        header: length of the header in front of the new text. Where the view knows of none yet,
            the positions are those of the view ``behind_header``.
    """

    left: int
    right: int
    left_found: bool
    right_found: bool
    shared: int
    header: int = 0


def find_overlap(view: View, prefix: str, suffix: str) -> Overlap:
    """Return how a newly sent text lies over the remembered one."""
    if view.header and prefix.startswith(view.header):
        length = len(view.header)
        return replace(_find_overlap(view, prefix[length:], suffix), header=length)
    at = _find_overlap(view, prefix, suffix)
    length = 0 if view.header else _header_length(view, prefix)
    if not length:
        return at
    body = view.behind_header(length)
    behind = _find_overlap(body, prefix[length:], suffix)
    slides = behind.left_found and _left_slides(body, behind, prefix[length:])
    return replace(behind, header=length) if slides and behind.shared > at.shared else at


def _header_length(view: View, prefix: str) -> int:
    """Return how many characters of whole lines might be a header; 0 if none are."""
    shared = common_prefix(view.text, prefix, view.sent_left)
    length = prefix.rfind("\n", 0, shared) + 1
    fits = _MIN_HEADER <= length <= _MAX_HEADER and length + _MIN_WINDOW <= len(prefix)
    return length if fits and 2 * shared < len(prefix) else 0


def _find_overlap(view: View, prefix: str, suffix: str) -> Overlap:
    """Do the same without regard to headers."""
    old, new = view.text, prefix + suffix
    begin = _begin(old, new, view.sent_left)
    end = _end(old, new, view.sent_right)
    left = view.sent_left if begin is None else begin
    right = view.sent_right if end is None else end
    front = back = 0
    if begin is not None:
        front = common_prefix(old, new[max(0, -left) :] if left < 0 else new, max(0, left))
    if end is not None:
        beyond = max(0, right - len(old))
        back = common_suffix(old, new[:-beyond] if beyond else new, min(right, len(old)))
    shared = min(front + back, len(new))
    if max(0, left) > min(right, len(old)):
        shared = 0  # the two edges contradict each other
    return Overlap(left, right, begin is not None, end is not None, shared)


def updated_view(view: View, at: Overlap, prefix: str, suffix: str, *, max_characters: int) -> View:
    """Return the view after a further request of the same document.

    Args:
        view: the view before it.
        at: how the new text lies over that view.
        prefix, suffix: texts as sent.
        max_characters: maximum length of a prompt; text that was sent is never cut for it.
    """
    header, prefix = prefix[: at.header], prefix[at.header :]
    if header and not view.header:
        view = view.behind_header(at.header)
    behind = _left_kept(view, at, prefix)
    ahead = _right_kept(view, at, suffix)
    if behind is None and ahead is None:
        return View.of(prefix, suffix, header)
    sent = len(prefix) + len(suffix)
    memory = _REMEMBERED * sent
    # The new text's position, and the old edges, in the joined text's positions.
    first = max(at.left - memory, 0) if at.left > 0 else at.left
    before = view.text[first : at.left] if behind is not None and at.left > 0 else ""
    after = view.text[at.right : at.right + memory] if ahead is not None else ""
    sent_left, caret = len(before), len(before) + len(prefix)
    sent_right = sent_left + sent
    left = sent_left if behind is None else max(0, behind - first)
    right = sent_right if ahead is None else sent_right + (ahead - at.right)
    right = min(right, sent_right + len(after))
    if left - sent_left > _MAX_LOSS * len(prefix):
        left = max(0, sent_left - int(_MAX_LOSS * len(prefix)))
    if sent_right - right > _MAX_LOSS * len(suffix):
        right = min(sent_right + int(_MAX_LOSS * len(suffix)), sent_right + len(after))
    limit = min(int(_MAX_GROWTH * sent), max(max_characters, sent))
    if right - left > limit and sent_left - left >= right - sent_right:
        left = sent_left
    if right - left > limit:
        right = sent_right
    if right - left > limit:
        left = sent_left
    text = f"{before}{prefix}{suffix}{after}"
    return View(text, caret, left, right, sent_left, sent_right, header)


def _left_slides(view: View, at: Overlap, prefix: str) -> bool:
    """Return whether text left at the far edge as some came in at the caret, or the reverse."""
    length = view.caret - view.sent_left
    moved = at.left - view.sent_left
    inward = len(prefix) - (length - moved)  # characters gained at the caret
    return inward * moved > 0 and min(length, len(prefix)) >= _PROBE


def _left_kept(view: View, at: Overlap, prefix: str) -> int | None:
    """Return the prompt's left edge in the old positions if it may stay, None otherwise."""
    if not at.left_found:
        return None
    length = view.caret - view.sent_left
    moved = at.left - view.sent_left
    inward = len(prefix) - (length - moved)
    if moved:
        return view.left if _left_slides(view, at, prefix) else None
    if view.left != view.sent_left and inward:
        old_lines = view.text.count("\n", view.sent_left, view.caret)
        if prefix.count("\n") != old_lines:
            return None
    return view.left


def _right_kept(view: View, at: Overlap, suffix: str) -> int | None:
    """Return the right edge; the mirror image of ``_left_kept``."""
    if not at.right_found:
        return None
    length = view.sent_right - view.caret
    moved = at.right - view.sent_right
    inward = len(suffix) - (length + moved)
    if moved:
        slides = inward * moved < 0 and min(length, len(suffix)) >= _PROBE
        return view.right if slides else None
    if view.right != view.sent_right and inward:
        old_lines = view.text.count("\n", view.caret, view.sent_right)
        if suffix.count("\n") != old_lines:
            return None
    return view.right


def _begin(old: str, new: str, hint: int) -> int | None:
    """Return where the new text starts in the old one; below 0 if the old one starts inside it."""
    if min(len(old), len(new)) < _MIN_WINDOW:
        return hint
    shared = common_prefix(old, new, hint)
    if 2 * shared >= len(new):
        return hint
    if places := _places(old, new[:_PROBE], hint):
        return max(places, key=lambda at: common_prefix(old, new, at))
    inside = new.find(old[:_PROBE])
    return -inside if inside > 0 else None


def _end(old: str, new: str, hint: int) -> int | None:
    """Return where the new text ends in the old one; the mirror image of ``_begin``."""
    if min(len(old), len(new)) < _MIN_WINDOW:
        return hint
    shared = common_suffix(old, new, hint)
    if 2 * shared >= len(new):
        return hint
    if places := _places(old, new[-_PROBE:], hint - _PROBE):
        ends = [at + _PROBE for at in places]
        return max(ends, key=lambda end: common_suffix(old, new, end))
    inside = new.rfind(old[-_PROBE:])
    beyond = len(new) - inside - _PROBE
    return len(old) + beyond if inside >= 0 and beyond > 0 else None


def _places(old: str, probe: str, hint: int) -> list[int]:
    """Return where a probe occurs: the places nearest to the hint on either side of it."""
    places: list[int] = []
    at = old.find(probe, hint)
    while at >= 0 and len(places) < _MAX_PLACES:
        places.append(at)
        at = old.find(probe, at + 1)
    at = old.rfind(probe, 0, max(0, hint - 1 + _PROBE))
    while at >= 0 and len(places) < 2 * _MAX_PLACES:
        places.append(at)
        at = old.rfind(probe, 0, at - 1 + _PROBE)
    return places
