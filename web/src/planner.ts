/** The documentation's page on the planner, which build.mjs fills in: only its theme can change. */

import { byId } from "./dom";
import { themeSwitch } from "./theme";

themeSwitch(byId<HTMLButtonElement>("theme"));
