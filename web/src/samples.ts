/** Texts to begin with, one per language; CARET marks where the caret stands. */

import type { LanguageId } from "./languages";

const CARET = "‸";

const PYTHON = `"""A shopping basket: articles, discounts, totals."""

from dataclasses import dataclass, field


@dataclass
class Article:
    name: str
    price: float
    count: int = 1

    @property
    def total(self) -> float:
        """The price of all pieces."""
        return self.price * self.count


@dataclass
class Basket:
    articles: list[Article] = field(default_factory=list)

    def add(self, article: Article) -> None:
        """Add an article, or more pieces of one that is there."""
        for known in self.articles:
            if known.name == article.name:
                known.count += article.count
                return
        self.articles.append(article)

    def remove(self, name: str) -> None:
        """Remove an article by its name."""
        self.articles = [one for one in self.articles if ‸]

    def total(self, discount: float = 0.0) -> float:
        """The price of everything, with a discount in percent."""
        if not 0 <= discount <= 100:
            raise ValueError(f"a discount of {discount}% makes no sense")
        whole = sum(article.total for article in self.articles)
        return whole * (100 - discount) / 100


def receipt(basket: Basket) -> str:
    """One line per article, and the total."""
    lines = [f"{one.count} x {one.name}: {one.total:.2f}" for one in basket.articles]
    return "\\n".join([*lines, f"total: {basket.total():.2f}"])


basket = Basket()
basket.add(Article("apple", 0.5, 6))
basket.add(Article("bread", 3.2))
print(receipt(basket))
`;

const JAVASCRIPT = `// A queue of tasks that runs a few of them at a time.

export class TaskQueue {
  constructor(limit = 2) {
    this.limit = limit;
    this.running = 0;
    this.waiting = [];
  }

  /** Add a task; the promise settles as the task does. */
  add(task) {
    return new Promise((resolve, reject) => {
      this.waiting.push({ task, resolve, reject });
      this.next();
    });
  }

  /** Start tasks as long as there is room. */
  next() {
    while (this.running < this.limit && this.waiting.length > 0) {
      const { task, resolve, reject } = this.waiting.shift();
      this.running += 1;
      task()
        .then(resolve, reject)
        .finally(() => {
          this.running -= 1;
          this.next();
        });
    }
  }

  get size() {
    return this.running + ‸;
  }
}

const queue = new TaskQueue(3);
for (const name of ["one", "two", "three", "four"]) {
  queue.add(() => fetch(name)).then((response) => console.log(name, response.status));
}
`;

const GO = `// Package words counts words.
package words

import (
	"sort"
	"strings"
)

// Count holds a word and how often it occurs.
type Count struct {
	Word  string
	Times int
}

// Frequencies returns how often each word of a text occurs.
func Frequencies(text string) map[string]int {
	found := make(map[string]int)
	for _, word := range strings.Fields(text) {
		word = strings.ToLower(strings.Trim(word, ".,;:!?"))
		if word != "" {
			‸
		}
	}
	return found
}

// Top returns the most frequent words, most frequent first.
func Top(text string, limit int) []Count {
	counts := []Count{}
	for word, times := range Frequencies(text) {
		counts = append(counts, Count{word, times})
	}
	sort.Slice(counts, func(i, j int) bool {
		return counts[i].Times > counts[j].Times
	})
	if len(counts) > limit {
		counts = counts[:limit]
	}
	return counts
}
`;

const RUST = `//! Rectangles that may overlap.

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rectangle {
    pub left: f64,
    pub top: f64,
    pub width: f64,
    pub height: f64,
}

impl Rectangle {
    pub fn new(left: f64, top: f64, width: f64, height: f64) -> Self {
        Self { left, top, width, height }
    }

    pub fn right(&self) -> f64 {
        self.left + self.width
    }

    pub fn bottom(&self) -> f64 {
        ‸
    }

    pub fn area(&self) -> f64 {
        self.width * self.height
    }

    /// The part that both cover, if there is one.
    pub fn intersection(&self, other: &Self) -> Option<Self> {
        let left = self.left.max(other.left);
        let top = self.top.max(other.top);
        let right = self.right().min(other.right());
        let bottom = self.bottom().min(other.bottom());
        if right <= left || bottom <= top {
            return None;
        }
        Some(Self::new(left, top, right - left, bottom - top))
    }
}
`;

const CPP = `// A ring buffer of fixed size.
#include <array>
#include <cstddef>
#include <optional>

template <typename T, std::size_t Size>
class RingBuffer {
public:
    bool push(const T& value) {
        if (full()) {
            return false;
        }
        items_[(first_ + count_) % Size] = value;
        ++count_;
        return true;
    }

    std::optional<T> pop() {
        if (empty()) {
            ‸
        }
        T value = items_[first_];
        first_ = (first_ + 1) % Size;
        --count_;
        return value;
    }

    bool empty() const { return count_ == 0; }
    bool full() const { return count_ == Size; }
    std::size_t size() const { return count_; }

private:
    std::array<T, Size> items_{};
    std::size_t first_ = 0;
    std::size_t count_ = 0;
};
`;

const PLAIN = `Dear neighbours,

on Saturday we will clear the path behind the houses. Please bring gloves and, if you have one, a
rake. We meet at nine in the morning and will be done by ‸

Afterwards there will be coffee and cake in our garden. If it rains, we will do it a week later.

Kind regards,
Anna and Paul
`;

const SAMPLES: Record<LanguageId, string> = {
  python: PYTHON,
  javascript: JAVASCRIPT,
  go: GO,
  rust: RUST,
  cpp: CPP,
  plain: PLAIN,
};

/** Return the sample of a language, and where its caret stands. */
export function sampleOf(language: LanguageId): { text: string; caret: number } {
  const sample = SAMPLES[language];
  return { text: sample.replace(CARET, ""), caret: sample.indexOf(CARET) };
}
