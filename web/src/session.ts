/**
 * The session: what each request cost, beside what it would have cost in PSM order.
 *
 * A document's first request is cold: nothing of it is cached, in any order. It is in the chart and
 * not in the sum, which is told only of enough requests to mean something.
 */

import type { Answered } from "./asking";
import { byId, count, make, makeSvg, plural } from "./dom";

/** What the model had to read before it could write something new, in tokens. */
interface Cost {
  computed: number;
  psm: number | undefined;
  cold: boolean;
}

const HEIGHT = 112;
const BASE = 94; // of the bars, from the top
const TOP = 14;
const SHOWN = 40; // requests
const MIN_BARS = 12; // that the chart has room for
const MIN_REQUESTS = 10; // that a sum is told of

/** Return a request's cost. Tokens that are written again count: in PSM order they are prompt. */
export function costOf({ prompt }: Answered, cold: boolean): Cost {
  const { psm, healed_tokens } = prompt.report;
  return {
    computed: prompt.computed_tokens + healed_tokens,
    psm: psm === null ? undefined : psm.prompt_tokens - psm.cached_tokens,
    cold,
  };
}

export class Session {
  private readonly costs: Cost[] = [];
  private readonly chart = byId("chart");
  private isNewDocument = true;

  constructor() {
    byId("total").replaceChildren(...this.summary());
    new ResizeObserver(() => this.drawChart()).observe(this.chart);
  }

  /** The next request is the first one of another document. */
  startDocument(): void {
    this.isNewDocument = true;
  }

  /** Add a request whose answer has begun. */
  add(answered: Answered): void {
    this.costs.push(costOf(answered, this.isNewDocument));
    this.isNewDocument = false;
    this.draw();
  }

  /** Show how fast the last answer is; the rate is that of the last one that is long enough. */
  showSpeed({ firstTokenAfter, tokensPerSecond }: Answered): void {
    byId("first-token").textContent = `${count(firstTokenAfter)} ms`;
    if (tokensPerSecond !== undefined) byId("rate").textContent = count(tokensPerSecond);
  }

  private draw(): void {
    const last = this.costs.at(-1)!;
    byId("computed").textContent = count(last.computed);
    byId("psm").textContent = last.psm === undefined ? "–" : count(last.psm);
    byId("total").replaceChildren(...this.summary());
    this.drawChart();
  }

  private drawChart(): void {
    if (this.costs.length === 0) return;
    this.chart.replaceChildren(...drawBars(this.costs, this.chart.clientWidth));
  }

  /** Return the headline: what was saved, or what it waits for. */
  private summary(): (Node | string)[] {
    const warm = this.costs.filter(({ cold }) => !cold);
    if (warm.length < MIN_REQUESTS) {
      const left = MIN_REQUESTS - warm.length;
      return [
        `What was saved is told after ${plural(left, "more request")}; the first one of a`
        + " document, for which nothing is cached, doesn't count.",
      ];
    }
    const computed = warm.reduce((sum, cost) => sum + cost.computed, 0);
    const requests = `${count(warm.length)} requests computed ${plural(computed, "token")}`;
    const psm = warm.reduce((sum, cost) => sum + (cost.psm ?? 0), 0);
    if (psm === 0) return [`${requests}.`];
    const share = Math.round(100 * (1 - computed / psm));
    const saved = make("strong", "", `${Math.abs(share)}% ${share < 0 ? "more" : "less"} than PSM`);
    return [saved, `: ${requests}; in PSM order ${count(psm)}.`];
  }
}

/** Return the chart: a bar per request, before one of what PSM would have computed. */
function drawBars(costs: readonly Cost[], width: number): SVGElement[] {
  const shown = costs.slice(-SHOWN);
  const first = costs.length - shown.length + 1;
  const most = Math.max(...shown.map((cost) => Math.max(cost.computed, cost.psm ?? 0)), 1);
  const step = width / Math.max(shown.length, MIN_BARS);
  const bars = shown.map((cost, place) => {
    const group = makeSvg("g", {});
    const title = makeSvg("title", {});
    const psm = cost.psm === undefined ? "" : `, ${count(cost.psm)} in PSM order`;
    const which = `Request ${first + place}${cost.cold ? ", the first of its document" : ""}`;
    title.textContent = `${which}: ${plural(cost.computed, "token")} computed${psm}`;
    const bar = (kind: string, tokens: number) => {
      const height = (tokens / most) * (BASE - TOP);
      const x = place * step + 1;
      return makeSvg("rect", {
        class: kind, x, width: Math.max(step - 2, 1), y: BASE - height, height,
      });
    };
    group.append(title, bar("hit", most), bar("psm", cost.psm ?? 0), bar(cost.cold ? "own cold" : "own", cost.computed));
    return group;
  });
  const last = first + shown.length - 1;
  return [
    ...bars,
    makeSvg("line", { x1: 0, x2: width, y1: BASE, y2: BASE }),
    label(`${count(most)} tokens`, 0, TOP - 5),
    label(`request ${first}`, 0, HEIGHT - 4),
    ...(last - first > 3 ? [label(`${last}`, shown.length * step - 1, HEIGHT - 4, "end")] : []),
  ];
}

function label(content: string, x: number, y: number, anchor = "start"): SVGElement {
  const element = makeSvg("text", { x, y, "text-anchor": anchor });
  element.textContent = content;
  return element;
}
