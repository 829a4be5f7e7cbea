/**
 * The editor's languages, and how each indents.
 *
 * Line-by-line parsers colour as well as needed here and take a tenth of the space of full ones.
 */

import { indentUnit, StreamLanguage, type StreamParser } from "@codemirror/language";
import { c, cpp } from "@codemirror/legacy-modes/mode/clike";
import { go } from "@codemirror/legacy-modes/mode/go";
import { javascript, typescript } from "@codemirror/legacy-modes/mode/javascript";
import { python } from "@codemirror/legacy-modes/mode/python";
import { rust } from "@codemirror/legacy-modes/mode/rust";
import type { Extension } from "@codemirror/state";
import { EditorView } from "@codemirror/view";

export interface Language {
  name: string;
  endings: string[];
  extension: () => Extension;
}

function language<T>(unit: string, parser: StreamParser<T>): Extension {
  return [StreamLanguage.define(parser), indentUnit.of(unit)];
}

export const LANGUAGES = {
  python: {
    name: "Python",
    endings: ["py", "pyi"],
    extension: () => language("    ", python),
  },
  javascript: {
    name: "JavaScript",
    endings: ["js", "jsx", "mjs", "cjs"],
    extension: () => language("  ", javascript),
  },
  typescript: {
    name: "TypeScript",
    endings: ["ts", "tsx", "mts", "cts"],
    extension: () => language("  ", typescript),
  },
  go: { name: "Go", endings: ["go"], extension: () => language("\t", go) },
  rust: { name: "Rust", endings: ["rs"], extension: () => language("    ", rust) },
  c: { name: "C", endings: ["c", "h"], extension: () => language("    ", c) },
  cpp: {
    name: "C++",
    endings: ["cc", "cpp", "cxx", "hh", "hpp"],
    extension: () => language("    ", cpp),
  },
  plain: { name: "Plain text", endings: [], extension: () => [indentUnit.of("  "), EditorView.lineWrapping] },
} satisfies Record<string, Language>;

export type LanguageId = keyof typeof LANGUAGES;

/** Return the language of a file by its name's ending. */
export function languageOf(fileName: string): LanguageId {
  const ending = fileName.split(".").pop()!.toLowerCase();
  const ids = Object.keys(LANGUAGES) as LanguageId[];
  return ids.find((id) => (LANGUAGES[id].endings as string[]).includes(ending)) ?? "plain";
}
