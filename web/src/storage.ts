/** Values that outlive the page, where the browser allows it; without that they are forgotten. */

export type Kind = "browser" | "tab";

const storageOf = (kind: Kind): Storage => (kind === "tab" ? sessionStorage : localStorage);

/** Return a stored value; null if there is none. */
export function load(kind: Kind, name: string): string | null {
  try {
    return storageOf(kind).getItem(`midfill.${name}`);
  } catch {
    return null;
  }
}

/** Store a value, or remove it: "". */
export function store(kind: Kind, name: string, value: string): void {
  try {
    if (value) storageOf(kind).setItem(`midfill.${name}`, value);
    else storageOf(kind).removeItem(`midfill.${name}`);
  } catch {
    // Storage is turned off or full: the page works without it.
  }
}
