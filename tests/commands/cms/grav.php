<?php
// The classes that the page of this CMS uses, and two saves: a new post, then the post at another place.
namespace Grav\Common { class Plugin { public $grav; } }
namespace Grav\Common\Page\Interfaces { interface PageInterface {} }
namespace RocketTheme\Toolbox\Event { class Event extends \ArrayObject {} }
namespace {
    define('GRAV_ROOT', getcwd());
    class Page implements Grav\Common\Page\Interfaces\PageInterface {
        public $original;
        function __construct(public $name) {}
        function path() { return GRAV_ROOT . "/user/pages/$this->name"; }
        function route() { return "/$this->name"; }
        function title() { return 'Hello'; }
        function getOriginal() { return $this->original; }
    }
    require 'page.php';
    $plugin = new Grav\Plugin\BriterWorkerPlugin();
    $user = ['email' => 'ada@example.org', 'fullname' => 'Ada Author', 'username' => 'ada'];
    $plugin->grav = ['user' => (object) $user];
    $fire = function ($event, $object) use ($plugin) {
        $method = $plugin::getSubscribedEvents()[$event][0];
        $plugin->$method(new RocketTheme\Toolbox\Event\Event(['object' => $object]));
    };
    $page = new Page('hello');
    if ($argv[1] === 'save') {
        $fire('onAdminSave', $page);
        $fire('onAdminAfterSave', $page);
        $fire('onAdminAfterSave', new stdClass());
    } else {
        $moved = new Page('bye');
        $moved->original = $page;
        $fire('onAdminSave', $moved);
        rename('user/pages/hello', 'user/pages/bye');
        $fire('onAdminAfterSave', $moved);
    }
}
