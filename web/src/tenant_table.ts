/** The table of tenants: what each of them asks, and how fast it is answered. */

import { make } from "./dom";
import type { History } from "./history";
import { COLUMNS } from "./panels";

const UNKNOWN = "–";

/** Return the table of the last seconds. */
export function tenantTable(history: History, tenants: readonly string[]): HTMLElement {
  const titles = ["Tenant", ...COLUMNS.map(({ title }) => title)];
  const head = make("tr", "", ...titles.map((title) => make("th", "", title)));
  const rows = tenants.map((tenant) => {
    const own = history.of(tenant);
    const values = COLUMNS.map(({ value, format }) => {
      const known = value(own);
      return make("td", "", known === undefined ? UNKNOWN : format(known));
    });
    const name = make("th", "", tenant);
    name.setAttribute("scope", "row");
    return make("tr", "", name, ...values);
  });
  return make("table", "", make("thead", "", head), make("tbody", "", ...rows));
}
