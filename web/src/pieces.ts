/** The parts of a suggestion that can be accepted one by one. */

const WORD = /^\s*(?:[\p{L}\p{M}\p{N}_]+|[^\p{L}\p{M}\p{N}_\s]+)/u;

/** Return the first word of a text, or its first run of other signs, with the blanks before it. */
export function firstWord(text: string): string {
  return WORD.exec(text)?.[0] ?? text;
}

/** Return the first line of a text; if that is empty, the line break with the line after it. */
export function firstLine(text: string): string {
  return /^\n*[^\n]*/.exec(text)![0] || text;
}
