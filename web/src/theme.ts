/** Light or dark: as the system has it, or as the user says; the choice is kept. */

import { load, store } from "./storage";

const THEMES = ["auto", "light", "dark"] as const;

/** Make a button that goes from one theme to the next. */
export function themeSwitch(button: HTMLButtonElement): void {
  let theme = THEMES.find((one) => one === load("browser", "theme")) ?? "auto";
  const show = () => {
    document.documentElement.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
  };
  button.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length] ?? "auto";
    store("browser", "theme", theme);
    show();
  });
  show();
}
