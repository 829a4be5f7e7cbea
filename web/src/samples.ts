/**
 * Texts to begin with, one per language, each complete as it stands in its file.
 *
 * What is between two marks is left out, and the caret stands there. It is what the default model
 * suggests in this place; a test asks it.
 */

import type { LanguageId } from "./languages";
import c from "./samples/c.txt";
import cpp from "./samples/cpp.txt";
import go from "./samples/go.txt";
import javascript from "./samples/javascript.txt";
import plain from "./samples/plain.txt";
import python from "./samples/python.txt";
import rust from "./samples/rust.txt";
import typescript from "./samples/typescript.txt";

const MARK = "‸";

const SAMPLES: Record<LanguageId, string> = {
  python, javascript, typescript, go, rust, c, cpp, plain,
};

/** Return the sample of a language, and where its caret stands. */
export function sampleOf(language: LanguageId): { text: string; caret: number } {
  const [before = "", , after = ""] = SAMPLES[language].split(MARK);
  return { text: before + after, caret: before.length };
}
