// Tells the server of the page when this tab opens and closes: the server ends after the last one.

page.on("data", ({ serve }) => {
  if (!serve.alive) return;
  const tab = crypto.randomUUID();
  const tell = (event) => navigator.sendBeacon(`${serve.alive}?${event}=${tab}`);
  tell("opened");
  window.addEventListener("pagehide", () => tell("closed"));
  window.addEventListener("pageshow", ({ persisted }) => persisted && tell("opened"));
});
