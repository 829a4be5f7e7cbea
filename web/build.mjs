// Builds the pages: node build.mjs [folder]. The same sources give the same bytes.
//
// What is bundled is listed with its licence in licences.txt.

import { build } from "esbuild";
import { Marked } from "marked";
import { cp, mkdir, readdir, readFile, rm, writeFile } from "node:fs/promises";
import { basename, dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const output = process.argv[2] ?? join(here, "../src/midfill/serving/server/pages/built");
const pages = ["playground", "dashboard", "planner"];
const docs = join(here, "../docs");
const served = { "playground.md": "/" }; // pages of the documentation that a server has itself

/** Return the folders of the packages that a bundle is made of. */
function packagesIn(inputs) {
  const names = Object.keys(inputs).map((input) =>
    input.match(/^(node_modules\/(?:@[^/]+\/)?[^/]+)\//)?.[1],
  );
  return [...new Set(names.filter(Boolean))].sort();
}

async function licenceOf(folder) {
  const { name, version, license } = JSON.parse(
    await readFile(join(here, folder, "package.json"), "utf8"),
  );
  const file = (await readdir(join(here, folder))).find((one) => /^licen[cs]e/i.test(one));
  if (file === undefined) throw new Error(`${name} has no licence file`);
  const text = (await readFile(join(here, folder, file), "utf8")).trim();
  return `${name} ${version} (${license})\n\n${text}\n`;
}

/**
 * Return a page of the documentation as HTML, and the figures that it shows.
 *
 * A server has this page and none of those that it refers to: these are named without a link.
 */
async function rendered(name) {
  const figures = [];
  const marked = new Marked();
  marked.use({
    renderer: {
      heading({ tokens, depth, text }) {
        const id = text.toLowerCase().replace(/[^\w\s-]/g, "").replace(/\s+/g, "-");
        return `<h${depth} id="${id}">${this.parser.parseInline(tokens)}</h${depth}>\n`;
      },
      link({ href, tokens }) {
        const text = this.parser.parseInline(tokens);
        const url = href.startsWith("https://") || href.startsWith("#") ? href : served[href];
        return url === undefined ? text : `<a href="${url}">${text}</a>`;
      },
      image({ href, text }) {
        figures.push(href);
        return `<img src="/pages/${basename(href)}" alt="${text}">`;
      },
    },
  });
  const html = marked.parse(await readFile(join(docs, name), "utf8"));
  return { html, figures };
}

await rm(output, { recursive: true, force: true });
await mkdir(output, { recursive: true });
const { metafile } = await build({
  absWorkingDir: here,
  entryPoints: pages.flatMap((page) => [`src/${page}.ts`, `src/${page}.css`]),
  outdir: output,
  bundle: true,
  minify: true,
  charset: "utf8",
  format: "iife",
  target: ["es2022", "chrome123", "firefox120", "safari17.5"],
  legalComments: "none",
  metafile: true,
});
for (const file of [...pages.map((page) => `${page}.html`), "icon.svg"]) {
  await cp(join(here, "src", file), join(output, file));
}
const { html, figures } = await rendered("planner.md");
const page = await readFile(join(here, "src/planner.html"), "utf8");
await writeFile(join(output, "planner.html"), page.replace("{{text}}", () => html));
for (const figure of figures) await cp(join(docs, figure), join(output, basename(figure)));
const licences = await Promise.all(packagesIn(metafile.inputs).map(licenceOf));
await writeFile(join(output, "licences.txt"), licences.join(`\n${"-".repeat(72)}\n\n`));
for (const file of await readdir(output)) {
  const { length } = await readFile(join(output, file));
  console.log(`${file.padEnd(20)} ${(length / 1000).toFixed(1).padStart(8)} kB`);
}
