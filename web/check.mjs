// Says whether the built pages are what the sources build, byte for byte.

import { execFileSync } from "node:child_process";
import { mkdtemp, readdir, readFile, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const committed = join(here, "../src/midfill/serving/server/pages/built");
const built = await mkdtemp(join(tmpdir(), "midfill-pages-"));
try {
  execFileSync(process.execPath, [join(here, "build.mjs"), built]);
  const names = [...new Set([...(await readdir(committed)), ...(await readdir(built))])];
  const contents = (folder, name) => readFile(join(folder, name)).catch(() => Buffer.alloc(0));
  const differ = [];
  for (const name of names.sort()) {
    const [one, other] = [await contents(committed, name), await contents(built, name)];
    if (!one.equals(other)) differ.push(name);
  }
  if (differ.length > 0) {
    console.error(`not what web/ builds: ${differ.join(", ")}; run make web and commit the result`);
    process.exitCode = 1;
  } else {
    console.log(`the ${names.length} built files are what web/ builds`);
  }
} finally {
  await rm(built, { recursive: true, force: true });
}
