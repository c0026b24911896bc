<?php
// Enqueue a post: php enqueue.php QUEUE SLUG PATH MESSAGE [AUTHOR-NAME AUTHOR-EMAIL [SCHEDULED-FOR]]
// PHP 8.1 or newer, no packages. To use it as a library: require_once 'enqueue.php';
declare(strict_types=1);

/**
 * Writes the job aside, then renames it into the queue: the worker never sees half a file.
 *
 * @param array $more 'author' => ['name' => …, 'email' => …], 'scheduledFor' => '2026-01-31T09:00:00+01:00'
 */
function enqueue(string $queue, string $slug, array $paths, string $message, array $more = []): string
{
    $id = bin2hex(random_bytes(16));
    $job = json_encode([
        'id' => $id,
        'slug' => $slug,
        'paths' => array_values($paths), // a list, also when keys are missing
        'message' => $message,
        'createdAt' => (new DateTimeImmutable('now', new DateTimeZone('UTC')))->format('Y-m-d\TH:i:s.v\Z'),
        ...$more,
    ], JSON_THROW_ON_ERROR | JSON_UNESCAPED_UNICODE | JSON_UNESCAPED_SLASHES);

    if (!is_dir($queue) && !mkdir($queue, 0777, true) && !is_dir($queue)) {
        throw new RuntimeException("cannot make the folder $queue");
    }
    $aside = "$queue/.$id.tmp";
    $file = fopen($aside, 'wb');
    if ($file === false || fwrite($file, $job) !== strlen($job) || !fflush($file) || !fsync($file)) {
        throw new RuntimeException("cannot write $aside");
    }
    fclose($file);
    if (!rename($aside, "$queue/$id.json")) {
        throw new RuntimeException("cannot rename $aside");
    }
    return $id;
}

if (PHP_SAPI === 'cli' && realpath($argv[0] ?? '') === __FILE__) {
    if (!in_array($argc, [5, 7, 8], true)) {
        fwrite(STDERR, "usage: enqueue.php QUEUE SLUG PATH MESSAGE [AUTHOR-NAME AUTHOR-EMAIL [SCHEDULED-FOR]]\n");
        exit(1);
    }
    [, $queue, $slug, $path, $message] = $argv;
    $more = isset($argv[5]) ? ['author' => ['name' => $argv[5], 'email' => $argv[6]]] : [];
    $more += isset($argv[7]) ? ['scheduledFor' => $argv[7]] : [];
    echo enqueue($queue, $slug, [$path], $message, $more), "\n";
}
