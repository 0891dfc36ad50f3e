// Light, dark, or as the system says.
const NAME = "engine-playground-theme";
const THEMES = ["system", "light", "dark"];

export function watchTheme(changed) {
  const button = document.getElementById("theme");
  const show = (theme) => {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
    changed();
  };
  button.addEventListener("click", () => {
    const now = document.documentElement.dataset.theme ?? "system";
    const next = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
    sessionStorage.setItem(NAME, next);
    show(next);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  const kept = sessionStorage.getItem(NAME);
  show(THEMES.includes(kept) ? kept : "system");
}
