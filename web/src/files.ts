/** Files from the user's disk, read as text. */

const MAX_CHARACTERS = 4_000_000; // what the server accepts before and after a caret

/** A file can't be opened; the message is for the user. */
export class FileError extends Error {}

/** Return the text of a file. */
export async function readText(file: File): Promise<string> {
  const millions = MAX_CHARACTERS / 1e6;
  const tooLong = `${file.name} is too long: at most ${millions} million characters can be opened.`;
  if (file.size > 4 * MAX_CHARACTERS) throw new FileError(tooLong);
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new FileError(`${file.name} can't be opened: it is not text in UTF-8.`);
  }
  if (text.includes("\0")) throw new FileError(`${file.name} can't be opened: it is not text.`);
  if (text.length > MAX_CHARACTERS) throw new FileError(tooLong);
  return text;
}
